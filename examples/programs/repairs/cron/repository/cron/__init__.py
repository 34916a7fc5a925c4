"""Times of repeated jobs, from lines like those of cron."""

from cron.schedule import Schedule

__all__ = ["Schedule"]
