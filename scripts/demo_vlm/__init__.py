"""The demo vision-language model: its tasks, its training, its held-out suites, its calibration prompts."""
