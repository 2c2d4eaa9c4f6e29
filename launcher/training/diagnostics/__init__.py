"""The torch checks of `launcher doctor`."""
