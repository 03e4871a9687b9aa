"""The exceptions that are a message to the user, never a traceback."""


class AnomedError(Exception):
    """Bad input or a state the user can mend. Says what was found, what was expected and what to do."""


class CaseProblem(AnomedError):
    """One case cannot be used. `code` is a snake_case word; `found`, `expected` and `hint` fill problems.csv."""

    def __init__(self, case: str, code: str, found: str, expected: str, hint: str):
        super().__init__(f"{case}: {code}: found {found}, expected {expected}; {hint}")
        self.row = {"case": case, "code": code, "found": found, "expected": expected, "hint": hint}
