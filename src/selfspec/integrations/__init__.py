"""selfspec inside other people's programs. One module for each."""
