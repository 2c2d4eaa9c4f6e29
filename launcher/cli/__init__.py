"""The command `launcher`: one file per verb; they parse, call and print. Heavy imports wait until a verb runs."""
