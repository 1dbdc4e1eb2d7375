"""The command line: flags, the rules that check them, and the banner that explains them. Needs no torch."""
