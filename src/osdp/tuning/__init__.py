"""Closing the loop: measured steps correct a profile, and the corrected profile plans again."""
