"""The one exception a user is meant to see."""


class UserError(Exception):
    """Something the user can mend: bad input, a missing file, a full disk.

    The message names the file, line or field and says what to do. The command line prints it without a
    traceback and exits with code 2.
    """
