"""The one exception that is a message to the user, never a traceback."""


class AnomedError(Exception):
    """Bad input or a state the user can mend. Says what was found, what was expected and what to do."""
