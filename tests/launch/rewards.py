"""Rewards that any model earns by chance, such as the share of even digits in the response."""


def even_digits(data_source, solution_str, ground_truth, extra_info=None) -> float:
    digits = [int(c) for c in solution_str if c.isdigit()]
    return sum(d % 2 == 0 for d in digits) / len(digits) if digits else 0.0


def always_right(data_source, solution_str, ground_truth, extra_info=None) -> float:
    return 1.0


def by_answer(data_source, solution_str, ground_truth, extra_info=None) -> float:
    """Score by the answer modulo 3: 0 never correct, 1 always, 2 for half of all responses."""
    remainder = int(ground_truth) % 3
    return float(remainder) if remainder < 2 else float(sum(solution_str.encode()) % 2)
