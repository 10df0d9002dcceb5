def main(words): return 0
