"""Cards of report.html, one file per subject."""
