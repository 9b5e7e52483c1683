def show(*a): return 0
def write_page(*a): pass
