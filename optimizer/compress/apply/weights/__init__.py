"""Apply the methods that choose the integers of a weight."""
