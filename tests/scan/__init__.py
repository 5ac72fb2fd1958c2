"""The scanner, on source written for it: it never runs what it reads, nor do its tests."""
