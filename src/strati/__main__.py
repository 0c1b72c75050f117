"""Run the command line as ``python -m strati``."""

from strati.cli.main import main

if __name__ == "__main__":
    main()
