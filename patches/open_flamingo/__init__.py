"""The family OpenFlamingo."""
