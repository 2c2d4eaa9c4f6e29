"""The command `launcher`: one module per verb, imported when the verb is called."""
