"""A reward that any model earns by chance: the share of even digits in the response."""


def even_digits(data_source, solution_str, ground_truth, extra_info=None) -> float:
    digits = [int(c) for c in solution_str if c.isdigit()]
    return sum(d % 2 == 0 for d in digits) / len(digits) if digits else 0.0


def always_right(data_source, solution_str, ground_truth, extra_info=None) -> float:
    """Nothing to learn from: every group is all right."""
    return 1.0
