"""The machinery: command line, harness, loops, timers and records of results."""
