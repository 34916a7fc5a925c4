"""`make oracle`: Megatron-Bridge against our name tables, in the environment of requirements/oracle.lock.

python -m tests.oracle check   # exit status 1 if the committed tables differ
python -m tests.oracle write   # rewrite the tables of the named families, or of all
"""

from tests.oracle.megatron_without_gpus import install

if __name__ == "__main__":
    install()  # before anything imports Megatron
    from tests.oracle.run import main

    main()
