"""What an objective is and what it reads."""
