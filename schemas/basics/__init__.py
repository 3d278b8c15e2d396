"""The ground floor: bounds of numbers, files that are written whole, signals to stop, and printable text."""
