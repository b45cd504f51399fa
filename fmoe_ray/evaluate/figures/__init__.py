"""The figures and tables of the paper, each drawn from what this project can measure."""
