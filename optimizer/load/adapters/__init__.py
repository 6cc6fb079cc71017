"""Merge adapters (LoRA, DoRA and others of peft) into the weights that they were trained on."""
