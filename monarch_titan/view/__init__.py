"""What a user sees of a run: terminal and report. Reads events, changes nothing."""
