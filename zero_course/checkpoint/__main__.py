"""The command line of `convert`: ``python -m zero_course.checkpoint DIR OUTPUT_FILE [--tag TAG]``."""

from .convert import main

main()
