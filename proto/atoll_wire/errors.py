"""The one base of errors that a user can mend: the command line shows their single line and no traceback."""


class UserError(Exception):
    """One line that names the thing, the fact, and the remedy."""
