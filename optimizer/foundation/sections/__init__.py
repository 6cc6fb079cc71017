"""Recipe sections that are used outside of recipe/, and types of values that sections share."""
