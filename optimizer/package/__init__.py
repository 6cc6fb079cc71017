"""Assemble one bundle, its manifest and its report from the outputs of finished stages."""
