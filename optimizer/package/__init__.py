"""From finished steps to one bundle, its manifest and its report."""
