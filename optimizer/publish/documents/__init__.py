"""Write documents about a bundle: bill of materials, provenance, signature, sealed file."""
