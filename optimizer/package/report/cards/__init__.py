"""The cards of report.html, a file per subject."""
