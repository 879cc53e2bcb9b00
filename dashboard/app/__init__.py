"""The what-if dashboard: a Streamlit app that draws what the command line computes.

::

    main            the script that Streamlit runs: language, navigation
    *_page          one screen each
    settings_link   a scenario as the settings in which it differs: in the address bar, and as a command line
    workers         processes beside the app that run what takes long; worker: such a process
    kept_results    their results on disk, bounded, by what they depend on
    theme           figures in the dark, and in Chinese
    wording         what is said on the screens, in both languages

Nothing is computed here that ``hbmtwin`` on a command line does not compute by the same functions.
"""
