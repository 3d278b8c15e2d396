"""What everything stands on: bounds of numbers, files that are written whole, signals to stop, printable text."""
