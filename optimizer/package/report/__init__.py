"""Render report.html and the summary that a run prints last, from the reports of its stages."""
