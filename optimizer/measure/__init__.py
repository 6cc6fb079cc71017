"""Times, energy and cost of a bundle on this machine, as a table that other machines read."""
