"""report.html and the lines a run prints last, from what the finished steps wrote."""
