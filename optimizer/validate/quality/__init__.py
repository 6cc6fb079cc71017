"""The same examples answered by baseline and candidate: is it as good?"""
