"""A reward that any model earns by chance: the share of even digits in the response."""


def even_digits(data_source, solution_str, ground_truth, extra_info=None) -> float:
    digits = [int(c) for c in solution_str if c.isdigit()]
    return sum(d % 2 == 0 for d in digits) / len(digits) if digits else 0.0


def always_right(data_source, solution_str, ground_truth, extra_info=None) -> float:
    """Nothing to learn from: every group is all right."""
    return 1.0


def by_answer(data_source, solution_str, ground_truth, extra_info=None) -> float:
    """Answers that 3 divides are never right, those with rest 1 always, the others by half of all responses."""
    rest = int(ground_truth) % 3
    return float(rest) if rest < 2 else float(sum(solution_str.encode()) % 2)
