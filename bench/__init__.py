"""Speed and memory beside the floor, torch's own strategies and DeepSpeed: ``make bench``."""
