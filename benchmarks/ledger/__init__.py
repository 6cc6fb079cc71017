"""False alarms of the ledger, and the memory of validation."""
