"""Own reward: the share of letters that stand in the right place (verl's calling convention; TRL's and OpenRLHF's work too)."""


def letters_in_place(data_source, solution_str, ground_truth, extra_info=None) -> dict[str, float]:
    """`score` is the reward; every other key becomes a curve of its own."""
    pairs = zip(solution_str, ground_truth, strict=False)
    in_place = sum(letter == wanted for letter, wanted in pairs)
    longest = max(len(solution_str), len(ground_truth))
    return {"score": in_place / longest, "right_length": float(len(solution_str) == len(ground_truth))}
