"""Base models: a catalogue, their shapes, and the tiny base of the smoke profile."""
