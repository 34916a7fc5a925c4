import datetime
import unittest

from cron import Schedule


class HiddenTest(unittest.TestCase):
    def test_either(self) -> None:
        start = datetime.datetime(2024, 3, 9)
        days = [time.day for time in Schedule("0 0 13 * fri").times(start, 4)]
        self.assertEqual(days, [13, 15, 22, 29])

    def test_month_still_counts(self) -> None:
        self.assertEqual(
            Schedule("0 0 1 6 sun").next(datetime.datetime(2024, 3, 1)), datetime.datetime(2024, 6, 1)
        )

    def test_one_star(self) -> None:
        start = datetime.datetime(2024, 3, 9)
        self.assertEqual(Schedule("0 0 13 * *").next(start).day, 13)
        self.assertEqual(Schedule("0 0 * * 7").next(start), datetime.datetime(2024, 3, 10))

    def test_is_due(self) -> None:
        schedule = Schedule("30 6 1,15 * mon")
        self.assertTrue(schedule.is_due(datetime.datetime(2024, 3, 15, 6, 30)))
        self.assertTrue(schedule.is_due(datetime.datetime(2024, 3, 18, 6, 30)))
        self.assertFalse(schedule.is_due(datetime.datetime(2024, 3, 19, 6, 30)))


if __name__ == "__main__":
    unittest.main()
