"""The worker process: loads the target, executes cases on one lane for life, judges them."""
