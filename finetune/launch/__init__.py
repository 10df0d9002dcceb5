"""How the ranks of a run begin: started here, or by another launcher; and what is ready before they train."""
