"""Commands on a finished bundle: bench, compare, doctor, explain, inspect, predict."""
