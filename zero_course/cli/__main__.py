"""``python -m zero_course.cli``."""

from . import app

app(prog_name="zero-course")
