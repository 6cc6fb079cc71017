"""Tables of facts about architectures."""
