import datetime
import unittest

from cron import Schedule

START = datetime.datetime(2024, 2, 27, 12, 34, 56)  # a Tuesday


class CronTest(unittest.TestCase):
    def test_steps_and_ranges(self) -> None:
        minutes = [time.minute for time in Schedule("*/20 * * * *").times(START, 3)]
        self.assertEqual(minutes, [40, 0, 20])
        hours = [time.hour for time in Schedule("5 9-11 * * *").times(START, 3)]
        self.assertEqual(hours, [9, 10, 11])

    def test_leap_day(self) -> None:
        self.assertEqual(Schedule("0 0 29 2 *").next(START), datetime.datetime(2024, 2, 29))

    def test_weekday(self) -> None:
        self.assertEqual(Schedule("0 8 * * mon").next(START), datetime.datetime(2024, 3, 4, 8))

    def test_errors(self) -> None:
        for line in ("* * * *", "60 * * * *", "5-1 * * * *", "*/0 * * * *", "a * * * *"):
            with self.assertRaises(ValueError):
                Schedule(line)
        with self.assertRaises(ValueError):
            Schedule("0 0 31 2 *").next(START)


if __name__ == "__main__":
    unittest.main()
