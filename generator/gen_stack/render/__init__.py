"""Renderers: pure functions from a plan to the text of files, one module for each target."""
