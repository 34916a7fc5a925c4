"""Own reward: the share of letters in the correct place (verl's signature; TRL's and OpenRLHF's work too)."""


def letters_in_place(data_source, solution_str, ground_truth, extra_info=None) -> dict[str, float]:
    """Return the reward as `score`; every other key becomes a curve."""
    pairs = zip(solution_str, ground_truth, strict=False)
    in_place = sum(letter == wanted for letter, wanted in pairs)
    longest = max(len(solution_str), len(ground_truth))
    return {"score": in_place / longest, "right_length": float(len(solution_str) == len(ground_truth))}
