"""Reward that an untrained model earns by chance, so each step has a gradient: the share of even digits."""


def even_digits(data_source, solution_str, ground_truth, extra_info=None) -> float:
    digits = [int(letter) for letter in solution_str if letter.isdigit()]
    return sum(digit % 2 == 0 for digit in digits) / len(digits) if digits else 0.0
