"""The command line: flags, the rules that check them, and the banner that says what they mean. Needs no torch."""
